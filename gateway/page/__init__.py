"""The page at /ui: what the fleet does, for people. Server-rendered; small modules make it live."""
