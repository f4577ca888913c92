"""The sans-IO heart: what to compute next and who owns which block.  Standard library only."""
