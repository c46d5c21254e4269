"""Why a configuration can't run."""
