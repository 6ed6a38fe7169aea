"""What the experiments of several lessons share: flags, results files, starting scripts, timing, tables."""
