"""Every kind of extension in one run."""

from tests.examples import arithmetic, characters, csv_sink, inverse_sqrt, lion, z_loss

__all__ = ["arithmetic", "characters", "csv_sink", "inverse_sqrt", "lion", "z_loss"]
