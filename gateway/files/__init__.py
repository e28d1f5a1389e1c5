"""Files and uploads over HTTP."""
