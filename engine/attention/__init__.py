"""Attention over the paged cache: one protocol, one implementation per device."""
