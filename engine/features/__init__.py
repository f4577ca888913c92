"""Rooms of features, each plugged into one seam and listed once in the factory; none knows another."""
