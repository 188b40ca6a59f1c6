"""Training data: from documents to token shards (`prepare`), and from shards to batches (`dataset`, `loader`).

sources, corpora → tokenizer → encode → shards, manifest → dataset → packing, sample_order → loader
"""
