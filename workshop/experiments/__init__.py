"""What the small measuring scripts of lesson 01 share: flags, timing, backends, tables and the crossover plot."""
