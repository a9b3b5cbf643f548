#ifndef FERRY_EXPORT_HPP
#define FERRY_EXPORT_HPP

/// Marker of symbols that the shared library exports; all others have hidden visibility.
#define FERRY_API __attribute__((visibility("default")))

#endif  // FERRY_EXPORT_HPP
