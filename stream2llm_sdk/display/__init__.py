"""How results show themselves in notebooks: HTML, inline SVG and plots that follow the page's light or dark theme.

Everything is drawn in `currentColor`, the page's own text colour, and in colours that stand out on white and on black
alike; backgrounds are transparent. No style sheet, script or identifier is put into the page.
"""
