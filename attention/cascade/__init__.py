"""Cascade attention: pages that several rows share are attended once for all of them. Imported only when used."""
