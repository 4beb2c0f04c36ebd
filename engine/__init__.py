"""What both kinds of node share: block hashes, KV layout, block pool, paged cache, sequences, model runner, sampling."""
