"""What both kinds of node share: hashes, layout, block pool, paged cache, sequences, model runner, sampling."""
