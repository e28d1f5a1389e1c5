"""The page at /ui: shows workers, batches and tenants. JavaScript keeps it up to date."""
