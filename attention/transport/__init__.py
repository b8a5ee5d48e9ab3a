"""How bytes of one engine's cache get into another's. What varies: in one process, over sockets, over NIXL."""
