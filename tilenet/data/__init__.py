"""What is read: images, labels, what is known of them, and which of them each step sees."""
