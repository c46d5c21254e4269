"""Reads TOML files and flags into one strict configuration, and writes it back as text."""
