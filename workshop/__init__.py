"""The small common package of the multi-GPU training workshop."""
