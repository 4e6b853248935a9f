"""The process in which untrusted programs run, and the process that tests them; both import the standard library alone.

Invariant: no process that has run a line of a candidate ever held what its answers are compared with.
"""
