"""Encoding: turn images and tars into shards."""
