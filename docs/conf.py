"""Sphinx's configuration of the site that `make docs` builds (`tools/build_docs.py`)."""

project = "Quickstep"
author = "The Quickstep authors"
root_doc = "README"
extensions = ["myst_parser"]

# as on the sites that render Markdown in a repository
myst_heading_anchors = 4
myst_enable_extensions = ["strikethrough"]
# pages begin with different levels of headings
suppress_warnings = ["myst.header"]

html_theme = "pydata_sphinx_theme"
html_title = "Quickstep"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navbar_align": "left",
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "header_links_before_dropdown": 6,
}
