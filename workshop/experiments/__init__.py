"""What the measuring scripts of the lessons share: flags, launches, timing, backends, models, tables and plots."""
