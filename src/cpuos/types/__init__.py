"""Wire types, one file a noun. Servers refuse unknown request fields; clients let unknown answer fields pass."""
