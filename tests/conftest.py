"""Being here puts this folder on the import path: tests of any folder can import ``fakes``."""
