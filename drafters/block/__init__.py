"""Block-parallel draft heads (DFlash, DFlash2, DSpark): spec, modules, formats, strict load; `family.py`."""
