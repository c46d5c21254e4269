"""The sections of the configuration, a file each."""
