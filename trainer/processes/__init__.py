"""Child processes: started by `Child`, called through `Peer`."""
