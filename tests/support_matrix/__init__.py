"""The support matrix: which features work together under which layouts."""
