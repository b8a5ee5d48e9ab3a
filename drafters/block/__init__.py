"""Block-parallel draft heads (DFlash, DSpark): spec, modules, formats, strict load; `family.py`."""
