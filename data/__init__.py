"""
Data sets: a folder for each, whose prepare.py writes train.bin and val.bin.

    prepare_text   what these scripts share: a text, or its download, becomes tokens
"""
