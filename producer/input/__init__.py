"""What is read: files of lines, tables, objects in buckets, requests of a Python program."""
