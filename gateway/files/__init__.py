"""Files over HTTP: what they are, how they come in, and how they go out."""
