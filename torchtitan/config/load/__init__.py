"""From TOML files and flags to one strict configuration, and back to text."""
