"""One fleet of servers for every engine whose model runs elsewhere."""
