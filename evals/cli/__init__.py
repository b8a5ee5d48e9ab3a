"""`specdec eval`: options in, a document and a table out."""
