"""Scripts that time the library, and the ones that made the embedded model. None of it is in the wheel."""
