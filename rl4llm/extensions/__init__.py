"""Features around training, one folder each. The library never imports an extension, so any of them can be deleted."""
