"""Input: images, labels, facts about them, and which of them each step sees."""
