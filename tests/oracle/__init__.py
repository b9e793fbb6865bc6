"""Comparison with MindFormers itself.

`make oracle` runs upstream's own converters in environments of their own and stores what they give in `golden/`; the tests here compare
`ms-convert` with those files and need no MindFormers.
"""
