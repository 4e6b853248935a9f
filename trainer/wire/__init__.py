"""Calls over HTTP, generated from the signatures of a Protocol: the store's and the runners' coordinator's."""
