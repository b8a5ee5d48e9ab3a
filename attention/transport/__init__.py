"""How bytes of one engine's cache get into another's. Implementations: within one process, over sockets, over NIXL."""
