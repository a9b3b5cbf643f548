#ifndef FERRY_EXPORT_HPP
#define FERRY_EXPORT_HPP

/// Marks what the shared library exports; everything else has hidden visibility.
#define FERRY_API __attribute__((visibility("default")))

#endif  // FERRY_EXPORT_HPP
