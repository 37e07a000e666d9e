"""One format a module; each makes text of a `Report`."""
