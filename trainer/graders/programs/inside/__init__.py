"""What runs in a sandbox: its first process, and the program or the test that this forks. Only the standard library.

Invariant: no process that has run a line of a program ever held what its answers are compared with.
"""
