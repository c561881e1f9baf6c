"""Continuous batching over models of transformers, and a server that speaks OpenAI's protocol.

    python -m sluice serve --model DIR

`model` runs packed rows, `loop` batches requests, `process` keeps both away from the web server, `api` is that server.
"""
