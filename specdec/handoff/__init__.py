"""Transfers of one model: each rank's end of a transport, what engines tell each other, reads of all ranks as one."""
