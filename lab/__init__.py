"""What the experiments of several lessons share: flags, records, starting scripts, timing, tables."""
