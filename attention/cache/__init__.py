"""Who owns which page, and the tensors behind the pages. What varies: layout, dtype and number of heads per group."""
