"""What browsers show: the server's page and its reference in `page/`, and the styles that reports share with them.

All of it is plain files. Nothing is fetched from elsewhere, and no file is generated.
"""
