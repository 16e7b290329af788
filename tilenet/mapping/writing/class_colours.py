"""Colours of the classes of a map."""

from colorsys import hsv_to_rgb


def class_colours(classes: int) -> list[tuple[int, int, int, int]]:
    """Distinct colours for class maps, (red, green, blue, alpha), 0 to 255.

    Hues a golden section apart are spread evenly, however many there are.
    """
    colours = []
    for index in range(classes):
        hue, value = (index * 0.618034 + 0.13) % 1, 0.9 if index % 2 == 0 else 0.65
        red, green, blue = (round(255 * part) for part in hsv_to_rgb(hue, 0.75, value))
        colours.append((red, green, blue, 255))
    return colours
