"""Who owns which page, and the tensors behind the pages. Groups differ in layout, dtype and number of heads."""
