"""Continues a training when ranks are lost, and lets ranks join it: `keras-ddl run -np MIN:MAX`."""
