"""`forebay doctor`: is this machine fit, and is the directory in order?"""
