"""Exercises in writing backward rules, graded by pytest with words instead of differences of numbers.

    python -m minigrad.study.exercises [FOLDER]          writes the files, with the rules left blank
    pytest FOLDER                                        grades them

problems/ the files, solved; table.py the cases and the known mistakes; grade.py the diagnosis; plugin.py what pytest
calls; __main__.py the command.
"""
