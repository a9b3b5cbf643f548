"""The release whose interface this is, then Ferry's own version. Imports nothing: the build reads it."""

__version__ = "2.1.0+ferry0.1.0"
